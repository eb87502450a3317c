llvm.func @softmax(%ptrs: !llvm.ptr, %ints: !llvm.ptr, %begin: i64, %end: i64) {
    %c0 = arith.constant 1 : i64
    %c1 = arith.constant 0 : i64
    %c2 = arith.constant 4 : i64
    %c3 = arith.constant 64 : i64
    %c4 = arith.constant -64 : i64
    %c5 = arith.constant -32 : i64
    %c6 = arith.constant -8 : i64
    %c7 = arith.constant dense<0xFF800000> : vector<8xf32>
    %c8 = arith.constant 32 : i64
    %c9 = arith.constant 8 : i64
    %c10 = arith.constant 16 : i64
    %c11 = arith.constant 24 : i64
    %c12 = arith.constant dense<[0, 1, 2, 3, 4, 5, 6, 7]> : vector<8xi32>
    %c13 = arith.constant dense<1.0> : vector<8xf32>
    %c14 = arith.constant -16 : i64
    %c15 = arith.constant dense<0.0> : vector<8xf32>
    %c16 = arith.constant dense<89.0> : vector<8xf32>
    %c17 = arith.constant dense<-104.0> : vector<8xf32>
    %c18 = arith.constant dense<12582912.0> : vector<8xf32>
    %c19 = arith.constant dense<1.4426950408889634> : vector<8xf32>
    %c20 = arith.constant dense<-0.693359375> : vector<8xf32>
    %c21 = arith.constant dense<0.00021219444> : vector<8xf32>
    %c22 = arith.constant dense<0.000198756915> : vector<8xf32>
    %c23 = arith.constant dense<0.0013981999507> : vector<8xf32>
    %c24 = arith.constant dense<0.0083334519073> : vector<8xf32>
    %c25 = arith.constant dense<0.041665795894> : vector<8xf32>
    %c26 = arith.constant dense<0.16666665459> : vector<8xf32>
    %c27 = arith.constant dense<0.5> : vector<8xf32>
    %c28 = arith.constant dense<1> : vector<8xi32>
    %c29 = arith.constant dense<127> : vector<8xi32>
    %c30 = arith.constant dense<23> : vector<8xi32>
    %0 = llvm.getelementptr %ints[0] : (!llvm.ptr) -> !llvm.ptr, i64
    %1 = llvm.load %0 : !llvm.ptr -> i64
    %2 = llvm.getelementptr %ints[1] : (!llvm.ptr) -> !llvm.ptr, i64
    %3 = llvm.load %2 : !llvm.ptr -> i64
    %4 = llvm.getelementptr %ptrs[0] : (!llvm.ptr) -> !llvm.ptr, !llvm.ptr
    %5 = llvm.load %4 : !llvm.ptr -> !llvm.ptr
    %6 = llvm.getelementptr %ptrs[1] : (!llvm.ptr) -> !llvm.ptr, !llvm.ptr
    %7 = llvm.load %6 : !llvm.ptr -> !llvm.ptr
    %8 = llvm.getelementptr %ptrs[2] : (!llvm.ptr) -> !llvm.ptr, !llvm.ptr
    %9 = llvm.load %8 : !llvm.ptr -> !llvm.ptr
    %10 = arith.muli %3, %c2 : i64
    %11 = arith.addi %10, %c3 : i64
    %12 = arith.andi %11, %c4 : i64
    %13 = llvm.getelementptr nusw %9[%12] : (!llvm.ptr, i64) -> !llvm.ptr, i8
    scf.for %unit = %begin to %end step %c0 : i64 {
      %14 = arith.muli %unit, %3 : i64
      %15 = llvm.getelementptr nusw %5[%14] : (!llvm.ptr, i64) -> !llvm.ptr, f32
      %16 = arith.muli %unit, %3 : i64
      %17 = llvm.getelementptr nusw %7[%16] : (!llvm.ptr, i64) -> !llvm.ptr, f32
      %18 = arith.subi %3, %c1 : i64
      %19 = arith.andi %18, %c5 : i64
      %20 = arith.andi %18, %c6 : i64
      %21 = arith.addi %c1, %19 : i64
      %22 = arith.addi %c1, %20 : i64
      %28:4 = scf.for %23 = %c1 to %21 step %c8 iter_args(%24 = %c7, %25 = %c7, %26 = %c7, %27 = %c7) -> (vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>) : i64 {
        %29 = arith.addi %23, %c9 : i64
        %30 = arith.addi %23, %c10 : i64
        %31 = arith.addi %23, %c11 : i64
        %32 = llvm.getelementptr nusw %15[%23] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %33 = llvm.load %32 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %34 = llvm.getelementptr nusw %15[%29] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %35 = llvm.load %34 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %36 = llvm.getelementptr nusw %15[%30] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %37 = llvm.load %36 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %38 = llvm.getelementptr nusw %15[%31] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %39 = llvm.load %38 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %40 = arith.cmpf ogt, %24, %33 : vector<8xf32>
        %41 = arith.select %40, %24, %33 : vector<8xi1>, vector<8xf32>
        %42 = arith.cmpf uno, %24, %24 : vector<8xf32>
        %43 = arith.select %42, %24, %41 : vector<8xi1>, vector<8xf32>
        %44 = arith.cmpf ogt, %25, %35 : vector<8xf32>
        %45 = arith.select %44, %25, %35 : vector<8xi1>, vector<8xf32>
        %46 = arith.cmpf uno, %25, %25 : vector<8xf32>
        %47 = arith.select %46, %25, %45 : vector<8xi1>, vector<8xf32>
        %48 = arith.cmpf ogt, %26, %37 : vector<8xf32>
        %49 = arith.select %48, %26, %37 : vector<8xi1>, vector<8xf32>
        %50 = arith.cmpf uno, %26, %26 : vector<8xf32>
        %51 = arith.select %50, %26, %49 : vector<8xi1>, vector<8xf32>
        %52 = arith.cmpf ogt, %27, %39 : vector<8xf32>
        %53 = arith.select %52, %27, %39 : vector<8xi1>, vector<8xf32>
        %54 = arith.cmpf uno, %27, %27 : vector<8xf32>
        %55 = arith.select %54, %27, %53 : vector<8xi1>, vector<8xf32>
        scf.yield %43, %47, %51, %55 : vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>
      }
      %56 = arith.cmpf ogt, %28#0, %28#1 : vector<8xf32>
      %57 = arith.select %56, %28#0, %28#1 : vector<8xi1>, vector<8xf32>
      %58 = arith.cmpf uno, %28#0, %28#0 : vector<8xf32>
      %59 = arith.select %58, %28#0, %57 : vector<8xi1>, vector<8xf32>
      %60 = arith.cmpf ogt, %28#2, %28#3 : vector<8xf32>
      %61 = arith.select %60, %28#2, %28#3 : vector<8xi1>, vector<8xf32>
      %62 = arith.cmpf uno, %28#2, %28#2 : vector<8xf32>
      %63 = arith.select %62, %28#2, %61 : vector<8xi1>, vector<8xf32>
      %64 = arith.cmpf ogt, %59, %63 : vector<8xf32>
      %65 = arith.select %64, %59, %63 : vector<8xi1>, vector<8xf32>
      %66 = arith.cmpf uno, %59, %59 : vector<8xf32>
      %67 = arith.select %66, %59, %65 : vector<8xi1>, vector<8xf32>
      %70:1 = scf.for %68 = %21 to %22 step %c9 iter_args(%69 = %67) -> (vector<8xf32>) : i64 {
        %71 = llvm.getelementptr nusw %15[%68] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %72 = llvm.load %71 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %73 = arith.cmpf ogt, %69, %72 : vector<8xf32>
        %74 = arith.select %73, %69, %72 : vector<8xi1>, vector<8xf32>
        %75 = arith.cmpf uno, %69, %69 : vector<8xf32>
        %76 = arith.select %75, %69, %74 : vector<8xi1>, vector<8xf32>
        scf.yield %76 : vector<8xf32>
      }
      %77 = arith.subi %3, %22 : i64
      %78 = arith.trunci %77 : i64 to i32
      %79 = vector.broadcast %78 : i32 to vector<8xi32>
      %80 = arith.cmpi slt, %c12, %79 : vector<8xi32>
      %81 = arith.cmpi sgt, %77, %c1 : i64
      %82:1 = scf.if %81 -> (vector<8xf32>) {
        %83 = llvm.getelementptr nusw %15[%22] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %84 = llvm.intr.masked.load %83, %80, %c13 {alignment = 4 : i32} : (!llvm.ptr, vector<8xi1>, vector<8xf32>) -> vector<8xf32>
        %85 = arith.select %80, %84, %c7 : vector<8xi1>, vector<8xf32>
        %86 = arith.cmpf ogt, %70#0, %85 : vector<8xf32>
        %87 = arith.select %86, %70#0, %85 : vector<8xi1>, vector<8xf32>
        %88 = arith.cmpf uno, %70#0, %70#0 : vector<8xf32>
        %89 = arith.select %88, %70#0, %87 : vector<8xi1>, vector<8xf32>
        scf.yield %89 : vector<8xf32>
      } else {
        scf.yield %70#0 : vector<8xf32>
      }
      %90 = vector.shuffle %82#0, %82#0 [0, 1, 2, 3] : vector<8xf32>, vector<8xf32>
      %91 = vector.shuffle %82#0, %82#0 [4, 5, 6, 7] : vector<8xf32>, vector<8xf32>
      %92 = arith.cmpf ogt, %90, %91 : vector<4xf32>
      %93 = arith.select %92, %90, %91 : vector<4xi1>, vector<4xf32>
      %94 = arith.cmpf uno, %90, %90 : vector<4xf32>
      %95 = arith.select %94, %90, %93 : vector<4xi1>, vector<4xf32>
      %96 = vector.shuffle %95, %95 [0, 1] : vector<4xf32>, vector<4xf32>
      %97 = vector.shuffle %95, %95 [2, 3] : vector<4xf32>, vector<4xf32>
      %98 = arith.cmpf ogt, %96, %97 : vector<2xf32>
      %99 = arith.select %98, %96, %97 : vector<2xi1>, vector<2xf32>
      %100 = arith.cmpf uno, %96, %96 : vector<2xf32>
      %101 = arith.select %100, %96, %99 : vector<2xi1>, vector<2xf32>
      %102 = vector.shuffle %101, %101 [0] : vector<2xf32>, vector<2xf32>
      %103 = vector.extract %102[0] : f32 from vector<1xf32>
      %104 = vector.shuffle %101, %101 [1] : vector<2xf32>, vector<2xf32>
      %105 = vector.extract %104[0] : f32 from vector<1xf32>
      %106 = arith.cmpf ogt, %103, %105 : f32
      %107 = arith.select %106, %103, %105 : f32
      %108 = arith.cmpf uno, %103, %103 : f32
      %109 = arith.select %108, %103, %107 : f32
      %110 = vector.broadcast %109 : f32 to vector<8xf32>
      %111 = arith.subi %3, %c1 : i64
      %112 = arith.andi %111, %c14 : i64
      %113 = arith.andi %111, %c6 : i64
      %114 = arith.addi %c1, %112 : i64
      %115 = arith.addi %c1, %113 : i64
      %119:2 = scf.for %116 = %c1 to %114 step %c10 iter_args(%117 = %c15, %118 = %c15) -> (vector<8xf32>, vector<8xf32>) : i64 {
        %120 = arith.addi %116, %c9 : i64
        %121 = llvm.getelementptr nusw %15[%116] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %122 = llvm.load %121 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %123 = llvm.getelementptr nusw %15[%120] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %124 = llvm.load %123 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %125 = arith.subf %122, %110 : vector<8xf32>
        %126 = arith.subf %124, %110 : vector<8xf32>
        %127 = arith.cmpf ogt, %125, %c16 : vector<8xf32>
        %128 = arith.select %127, %c16, %125 : vector<8xi1>, vector<8xf32>
        %129 = arith.cmpf olt, %128, %c17 : vector<8xf32>
        %130 = arith.select %129, %c17, %128 : vector<8xi1>, vector<8xf32>
        %131 = math.fma %130, %c19, %c18 : vector<8xf32>
        %132 = arith.subf %131, %c18 : vector<8xf32>
        %133 = math.fma %132, %c20, %130 : vector<8xf32>
        %134 = math.fma %132, %c21, %133 : vector<8xf32>
        %135 = arith.bitcast %131 : vector<8xf32> to vector<8xi32>
        %136 = arith.bitcast %c18 : vector<8xf32> to vector<8xi32>
        %137 = arith.subi %135, %136 : vector<8xi32>
        %138 = arith.mulf %134, %134 : vector<8xf32>
        %139 = math.fma %c22, %134, %c23 : vector<8xf32>
        %140 = math.fma %139, %134, %c24 : vector<8xf32>
        %141 = math.fma %140, %134, %c25 : vector<8xf32>
        %142 = math.fma %141, %134, %c26 : vector<8xf32>
        %143 = math.fma %142, %134, %c27 : vector<8xf32>
        %144 = arith.addf %134, %c13 : vector<8xf32>
        %145 = math.fma %138, %143, %144 : vector<8xf32>
        %146 = arith.shrsi %137, %c28 : vector<8xi32>
        %147 = arith.subi %137, %146 : vector<8xi32>
        %148 = arith.addi %146, %c29 : vector<8xi32>
        %149 = arith.shli %148, %c30 : vector<8xi32>
        %150 = arith.bitcast %149 : vector<8xi32> to vector<8xf32>
        %151 = arith.mulf %145, %150 : vector<8xf32>
        %152 = arith.addi %147, %c29 : vector<8xi32>
        %153 = arith.shli %152, %c30 : vector<8xi32>
        %154 = arith.bitcast %153 : vector<8xi32> to vector<8xf32>
        %155 = arith.mulf %151, %154 : vector<8xf32>
        %156 = llvm.getelementptr nusw %9[%116] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        llvm.store %155, %156 {alignment = 4 : i64} : vector<8xf32>, !llvm.ptr
        %157 = arith.cmpf ogt, %126, %c16 : vector<8xf32>
        %158 = arith.select %157, %c16, %126 : vector<8xi1>, vector<8xf32>
        %159 = arith.cmpf olt, %158, %c17 : vector<8xf32>
        %160 = arith.select %159, %c17, %158 : vector<8xi1>, vector<8xf32>
        %161 = math.fma %160, %c19, %c18 : vector<8xf32>
        %162 = arith.subf %161, %c18 : vector<8xf32>
        %163 = math.fma %162, %c20, %160 : vector<8xf32>
        %164 = math.fma %162, %c21, %163 : vector<8xf32>
        %165 = arith.bitcast %161 : vector<8xf32> to vector<8xi32>
        %166 = arith.bitcast %c18 : vector<8xf32> to vector<8xi32>
        %167 = arith.subi %165, %166 : vector<8xi32>
        %168 = arith.mulf %164, %164 : vector<8xf32>
        %169 = math.fma %c22, %164, %c23 : vector<8xf32>
        %170 = math.fma %169, %164, %c24 : vector<8xf32>
        %171 = math.fma %170, %164, %c25 : vector<8xf32>
        %172 = math.fma %171, %164, %c26 : vector<8xf32>
        %173 = math.fma %172, %164, %c27 : vector<8xf32>
        %174 = arith.addf %164, %c13 : vector<8xf32>
        %175 = math.fma %168, %173, %174 : vector<8xf32>
        %176 = arith.shrsi %167, %c28 : vector<8xi32>
        %177 = arith.subi %167, %176 : vector<8xi32>
        %178 = arith.addi %176, %c29 : vector<8xi32>
        %179 = arith.shli %178, %c30 : vector<8xi32>
        %180 = arith.bitcast %179 : vector<8xi32> to vector<8xf32>
        %181 = arith.mulf %175, %180 : vector<8xf32>
        %182 = arith.addi %177, %c29 : vector<8xi32>
        %183 = arith.shli %182, %c30 : vector<8xi32>
        %184 = arith.bitcast %183 : vector<8xi32> to vector<8xf32>
        %185 = arith.mulf %181, %184 : vector<8xf32>
        %186 = llvm.getelementptr nusw %9[%120] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        llvm.store %185, %186 {alignment = 4 : i64} : vector<8xf32>, !llvm.ptr
        %187 = arith.addf %117, %155 : vector<8xf32>
        %188 = arith.addf %118, %185 : vector<8xf32>
        scf.yield %187, %188 : vector<8xf32>, vector<8xf32>
      }
      %189 = arith.addf %119#0, %119#1 : vector<8xf32>
      %192:1 = scf.for %190 = %114 to %115 step %c9 iter_args(%191 = %189) -> (vector<8xf32>) : i64 {
        %193 = llvm.getelementptr nusw %15[%190] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %194 = llvm.load %193 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %195 = arith.subf %194, %110 : vector<8xf32>
        %196 = arith.cmpf ogt, %195, %c16 : vector<8xf32>
        %197 = arith.select %196, %c16, %195 : vector<8xi1>, vector<8xf32>
        %198 = arith.cmpf olt, %197, %c17 : vector<8xf32>
        %199 = arith.select %198, %c17, %197 : vector<8xi1>, vector<8xf32>
        %200 = math.fma %199, %c19, %c18 : vector<8xf32>
        %201 = arith.subf %200, %c18 : vector<8xf32>
        %202 = math.fma %201, %c20, %199 : vector<8xf32>
        %203 = math.fma %201, %c21, %202 : vector<8xf32>
        %204 = arith.bitcast %200 : vector<8xf32> to vector<8xi32>
        %205 = arith.bitcast %c18 : vector<8xf32> to vector<8xi32>
        %206 = arith.subi %204, %205 : vector<8xi32>
        %207 = arith.mulf %203, %203 : vector<8xf32>
        %208 = math.fma %c22, %203, %c23 : vector<8xf32>
        %209 = math.fma %208, %203, %c24 : vector<8xf32>
        %210 = math.fma %209, %203, %c25 : vector<8xf32>
        %211 = math.fma %210, %203, %c26 : vector<8xf32>
        %212 = math.fma %211, %203, %c27 : vector<8xf32>
        %213 = arith.addf %203, %c13 : vector<8xf32>
        %214 = math.fma %207, %212, %213 : vector<8xf32>
        %215 = arith.shrsi %206, %c28 : vector<8xi32>
        %216 = arith.subi %206, %215 : vector<8xi32>
        %217 = arith.addi %215, %c29 : vector<8xi32>
        %218 = arith.shli %217, %c30 : vector<8xi32>
        %219 = arith.bitcast %218 : vector<8xi32> to vector<8xf32>
        %220 = arith.mulf %214, %219 : vector<8xf32>
        %221 = arith.addi %216, %c29 : vector<8xi32>
        %222 = arith.shli %221, %c30 : vector<8xi32>
        %223 = arith.bitcast %222 : vector<8xi32> to vector<8xf32>
        %224 = arith.mulf %220, %223 : vector<8xf32>
        %225 = llvm.getelementptr nusw %9[%190] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        llvm.store %224, %225 {alignment = 4 : i64} : vector<8xf32>, !llvm.ptr
        %226 = arith.addf %191, %224 : vector<8xf32>
        scf.yield %226 : vector<8xf32>
      }
      %227 = arith.subi %3, %115 : i64
      %228 = arith.trunci %227 : i64 to i32
      %229 = vector.broadcast %228 : i32 to vector<8xi32>
      %230 = arith.cmpi slt, %c12, %229 : vector<8xi32>
      %231 = arith.cmpi sgt, %227, %c1 : i64
      %232:1 = scf.if %231 -> (vector<8xf32>) {
        %233 = llvm.getelementptr nusw %15[%115] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %234 = llvm.intr.masked.load %233, %230, %c13 {alignment = 4 : i32} : (!llvm.ptr, vector<8xi1>, vector<8xf32>) -> vector<8xf32>
        %235 = arith.subf %234, %110 : vector<8xf32>
        %236 = arith.cmpf ogt, %235, %c16 : vector<8xf32>
        %237 = arith.select %236, %c16, %235 : vector<8xi1>, vector<8xf32>
        %238 = arith.cmpf olt, %237, %c17 : vector<8xf32>
        %239 = arith.select %238, %c17, %237 : vector<8xi1>, vector<8xf32>
        %240 = math.fma %239, %c19, %c18 : vector<8xf32>
        %241 = arith.subf %240, %c18 : vector<8xf32>
        %242 = math.fma %241, %c20, %239 : vector<8xf32>
        %243 = math.fma %241, %c21, %242 : vector<8xf32>
        %244 = arith.bitcast %240 : vector<8xf32> to vector<8xi32>
        %245 = arith.bitcast %c18 : vector<8xf32> to vector<8xi32>
        %246 = arith.subi %244, %245 : vector<8xi32>
        %247 = arith.mulf %243, %243 : vector<8xf32>
        %248 = math.fma %c22, %243, %c23 : vector<8xf32>
        %249 = math.fma %248, %243, %c24 : vector<8xf32>
        %250 = math.fma %249, %243, %c25 : vector<8xf32>
        %251 = math.fma %250, %243, %c26 : vector<8xf32>
        %252 = math.fma %251, %243, %c27 : vector<8xf32>
        %253 = arith.addf %243, %c13 : vector<8xf32>
        %254 = math.fma %247, %252, %253 : vector<8xf32>
        %255 = arith.shrsi %246, %c28 : vector<8xi32>
        %256 = arith.subi %246, %255 : vector<8xi32>
        %257 = arith.addi %255, %c29 : vector<8xi32>
        %258 = arith.shli %257, %c30 : vector<8xi32>
        %259 = arith.bitcast %258 : vector<8xi32> to vector<8xf32>
        %260 = arith.mulf %254, %259 : vector<8xf32>
        %261 = arith.addi %256, %c29 : vector<8xi32>
        %262 = arith.shli %261, %c30 : vector<8xi32>
        %263 = arith.bitcast %262 : vector<8xi32> to vector<8xf32>
        %264 = arith.mulf %260, %263 : vector<8xf32>
        %265 = llvm.getelementptr nusw %9[%115] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        llvm.store %264, %265 {alignment = 4 : i64} : vector<8xf32>, !llvm.ptr
        %266 = arith.select %230, %264, %c15 : vector<8xi1>, vector<8xf32>
        %267 = arith.addf %192#0, %266 : vector<8xf32>
        scf.yield %267 : vector<8xf32>
      } else {
        scf.yield %192#0 : vector<8xf32>
      }
      %268 = vector.shuffle %232#0, %232#0 [0, 1, 2, 3] : vector<8xf32>, vector<8xf32>
      %269 = vector.shuffle %232#0, %232#0 [4, 5, 6, 7] : vector<8xf32>, vector<8xf32>
      %270 = arith.addf %268, %269 : vector<4xf32>
      %271 = vector.shuffle %270, %270 [0, 1] : vector<4xf32>, vector<4xf32>
      %272 = vector.shuffle %270, %270 [2, 3] : vector<4xf32>, vector<4xf32>
      %273 = arith.addf %271, %272 : vector<2xf32>
      %274 = vector.shuffle %273, %273 [0] : vector<2xf32>, vector<2xf32>
      %275 = vector.extract %274[0] : f32 from vector<1xf32>
      %276 = vector.shuffle %273, %273 [1] : vector<2xf32>, vector<2xf32>
      %277 = vector.extract %276[0] : f32 from vector<1xf32>
      %278 = arith.addf %275, %277 : f32
      %279 = vector.broadcast %278 : f32 to vector<8xf32>
      %280 = arith.subi %3, %c1 : i64
      %281 = arith.andi %280, %c5 : i64
      %282 = arith.andi %280, %c6 : i64
      %283 = arith.addi %c1, %281 : i64
      %284 = arith.addi %c1, %282 : i64
      scf.for %285 = %c1 to %283 step %c8 : i64 {
        %286 = arith.addi %285, %c9 : i64
        %287 = arith.addi %285, %c10 : i64
        %288 = arith.addi %285, %c11 : i64
        %289 = llvm.getelementptr nusw %9[%285] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %290 = llvm.load %289 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %291 = llvm.getelementptr nusw %9[%286] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %292 = llvm.load %291 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %293 = llvm.getelementptr nusw %9[%287] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %294 = llvm.load %293 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %295 = llvm.getelementptr nusw %9[%288] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %296 = llvm.load %295 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %297 = arith.divf %290, %279 : vector<8xf32>
        %298 = arith.divf %292, %279 : vector<8xf32>
        %299 = arith.divf %294, %279 : vector<8xf32>
        %300 = arith.divf %296, %279 : vector<8xf32>
        %301 = llvm.getelementptr nusw %17[%285] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        llvm.store %297, %301 {alignment = 4 : i64} : vector<8xf32>, !llvm.ptr
        %302 = llvm.getelementptr nusw %17[%286] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        llvm.store %298, %302 {alignment = 4 : i64} : vector<8xf32>, !llvm.ptr
        %303 = llvm.getelementptr nusw %17[%287] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        llvm.store %299, %303 {alignment = 4 : i64} : vector<8xf32>, !llvm.ptr
        %304 = llvm.getelementptr nusw %17[%288] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        llvm.store %300, %304 {alignment = 4 : i64} : vector<8xf32>, !llvm.ptr
      }
      scf.for %305 = %283 to %284 step %c9 : i64 {
        %306 = llvm.getelementptr nusw %9[%305] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %307 = llvm.load %306 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %308 = arith.divf %307, %279 : vector<8xf32>
        %309 = llvm.getelementptr nusw %17[%305] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        llvm.store %308, %309 {alignment = 4 : i64} : vector<8xf32>, !llvm.ptr
      }
      %310 = arith.subi %3, %284 : i64
      %311 = arith.trunci %310 : i64 to i32
      %312 = vector.broadcast %311 : i32 to vector<8xi32>
      %313 = arith.cmpi slt, %c12, %312 : vector<8xi32>
      %314 = arith.cmpi sgt, %310, %c1 : i64
      scf.if %314 {
        %315 = llvm.getelementptr nusw %9[%284] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %316 = llvm.load %315 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %317 = arith.divf %316, %279 : vector<8xf32>
        %318 = llvm.getelementptr nusw %17[%284] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        llvm.intr.masked.store %317, %318, %313 {alignment = 4 : i32} : vector<8xf32>, vector<8xi1> into !llvm.ptr
      }
    }
    llvm.return
}
