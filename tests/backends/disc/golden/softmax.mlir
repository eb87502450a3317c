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
    %13 = llvm.getelementptr %9[%12] : (!llvm.ptr, i64) -> !llvm.ptr, i8
    scf.for %unit = %begin to %end step %c0 : i64 {
      %14 = arith.muli %unit, %3 : i64
      %15 = llvm.getelementptr %5[%14] : (!llvm.ptr, i64) -> !llvm.ptr, f32
      %16 = arith.muli %unit, %3 : i64
      %17 = llvm.getelementptr %7[%16] : (!llvm.ptr, i64) -> !llvm.ptr, f32
      %18 = arith.subi %3, %c1 : i64
      %19 = arith.andi %18, %c5 : i64
      %20 = arith.andi %18, %c6 : i64
      %21 = arith.addi %c1, %19 : i64
      %22 = arith.addi %c1, %20 : i64
      %28:4 = scf.for %23 = %c1 to %21 step %c8 iter_args(%24 = %c7, %25 = %c7, %26 = %c7, %27 = %c7) -> (vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>) : i64 {
        %29 = arith.addi %23, %c9 : i64
        %30 = arith.addi %23, %c10 : i64
        %31 = arith.addi %23, %c11 : i64
        %32 = llvm.getelementptr %15[%23] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %33 = llvm.load %32 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %34 = llvm.getelementptr %15[%29] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %35 = llvm.load %34 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %36 = llvm.getelementptr %15[%30] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %37 = llvm.load %36 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %38 = llvm.getelementptr %15[%31] : (!llvm.ptr, i64) -> !llvm.ptr, f32
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
        %71 = llvm.getelementptr %15[%68] : (!llvm.ptr, i64) -> !llvm.ptr, f32
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
      %83:1 = scf.if %81 -> (vector<8xf32>) {
        %84 = llvm.getelementptr %15[%22] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %85 = llvm.intr.masked.load %84, %80, %c13 {alignment = 4 : i32} : (!llvm.ptr, vector<8xi1>, vector<8xf32>) -> vector<8xf32>
        %86 = arith.select %80, %85, %c7 : vector<8xi1>, vector<8xf32>
        %87 = arith.cmpf ogt, %70#0, %86 : vector<8xf32>
        %88 = arith.select %87, %70#0, %86 : vector<8xi1>, vector<8xf32>
        %89 = arith.cmpf uno, %70#0, %70#0 : vector<8xf32>
        %90 = arith.select %89, %70#0, %88 : vector<8xi1>, vector<8xf32>
        scf.yield %90 : vector<8xf32>
      } else {
        scf.yield %70#0 : vector<8xf32>
      }
      %91 = vector.shuffle %83#0, %83#0 [0, 1, 2, 3] : vector<8xf32>, vector<8xf32>
      %92 = vector.shuffle %83#0, %83#0 [4, 5, 6, 7] : vector<8xf32>, vector<8xf32>
      %93 = arith.cmpf ogt, %91, %92 : vector<4xf32>
      %94 = arith.select %93, %91, %92 : vector<4xi1>, vector<4xf32>
      %95 = arith.cmpf uno, %91, %91 : vector<4xf32>
      %96 = arith.select %95, %91, %94 : vector<4xi1>, vector<4xf32>
      %97 = vector.shuffle %96, %96 [0, 1] : vector<4xf32>, vector<4xf32>
      %98 = vector.shuffle %96, %96 [2, 3] : vector<4xf32>, vector<4xf32>
      %99 = arith.cmpf ogt, %97, %98 : vector<2xf32>
      %100 = arith.select %99, %97, %98 : vector<2xi1>, vector<2xf32>
      %101 = arith.cmpf uno, %97, %97 : vector<2xf32>
      %102 = arith.select %101, %97, %100 : vector<2xi1>, vector<2xf32>
      %103 = vector.shuffle %102, %102 [0] : vector<2xf32>, vector<2xf32>
      %104 = vector.extract %103[0] : f32 from vector<1xf32>
      %105 = vector.shuffle %102, %102 [1] : vector<2xf32>, vector<2xf32>
      %106 = vector.extract %105[0] : f32 from vector<1xf32>
      %107 = arith.cmpf ogt, %104, %106 : f32
      %108 = arith.select %107, %104, %106 : f32
      %109 = arith.cmpf uno, %104, %104 : f32
      %110 = arith.select %109, %104, %108 : f32
      %111 = vector.broadcast %110 : f32 to vector<8xf32>
      %112 = arith.subi %3, %c1 : i64
      %113 = arith.andi %112, %c14 : i64
      %114 = arith.andi %112, %c6 : i64
      %115 = arith.addi %c1, %113 : i64
      %116 = arith.addi %c1, %114 : i64
      %120:2 = scf.for %117 = %c1 to %115 step %c10 iter_args(%118 = %c15, %119 = %c15) -> (vector<8xf32>, vector<8xf32>) : i64 {
        %121 = arith.addi %117, %c9 : i64
        %122 = llvm.getelementptr %15[%117] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %123 = llvm.load %122 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %124 = llvm.getelementptr %15[%121] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %125 = llvm.load %124 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %126 = arith.subf %123, %111 : vector<8xf32>
        %127 = arith.subf %125, %111 : vector<8xf32>
        %128 = arith.cmpf ogt, %126, %c16 : vector<8xf32>
        %129 = arith.select %128, %c16, %126 : vector<8xi1>, vector<8xf32>
        %130 = arith.cmpf olt, %129, %c17 : vector<8xf32>
        %131 = arith.select %130, %c17, %129 : vector<8xi1>, vector<8xf32>
        %132 = math.fma %131, %c19, %c18 : vector<8xf32>
        %133 = arith.subf %132, %c18 : vector<8xf32>
        %134 = math.fma %133, %c20, %131 : vector<8xf32>
        %135 = math.fma %133, %c21, %134 : vector<8xf32>
        %136 = arith.bitcast %132 : vector<8xf32> to vector<8xi32>
        %137 = arith.bitcast %c18 : vector<8xf32> to vector<8xi32>
        %138 = arith.subi %136, %137 : vector<8xi32>
        %139 = arith.mulf %135, %135 : vector<8xf32>
        %140 = math.fma %c22, %135, %c23 : vector<8xf32>
        %141 = math.fma %140, %135, %c24 : vector<8xf32>
        %142 = math.fma %141, %135, %c25 : vector<8xf32>
        %143 = math.fma %142, %135, %c26 : vector<8xf32>
        %144 = math.fma %143, %135, %c27 : vector<8xf32>
        %145 = arith.addf %135, %c13 : vector<8xf32>
        %146 = math.fma %139, %144, %145 : vector<8xf32>
        %147 = arith.shrsi %138, %c28 : vector<8xi32>
        %148 = arith.subi %138, %147 : vector<8xi32>
        %149 = arith.addi %147, %c29 : vector<8xi32>
        %150 = arith.shli %149, %c30 : vector<8xi32>
        %151 = arith.bitcast %150 : vector<8xi32> to vector<8xf32>
        %152 = arith.mulf %146, %151 : vector<8xf32>
        %153 = arith.addi %148, %c29 : vector<8xi32>
        %154 = arith.shli %153, %c30 : vector<8xi32>
        %155 = arith.bitcast %154 : vector<8xi32> to vector<8xf32>
        %156 = arith.mulf %152, %155 : vector<8xf32>
        %157 = llvm.getelementptr %9[%117] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        llvm.store %156, %157 {alignment = 4 : i64} : vector<8xf32>, !llvm.ptr
        %158 = arith.cmpf ogt, %127, %c16 : vector<8xf32>
        %159 = arith.select %158, %c16, %127 : vector<8xi1>, vector<8xf32>
        %160 = arith.cmpf olt, %159, %c17 : vector<8xf32>
        %161 = arith.select %160, %c17, %159 : vector<8xi1>, vector<8xf32>
        %162 = math.fma %161, %c19, %c18 : vector<8xf32>
        %163 = arith.subf %162, %c18 : vector<8xf32>
        %164 = math.fma %163, %c20, %161 : vector<8xf32>
        %165 = math.fma %163, %c21, %164 : vector<8xf32>
        %166 = arith.bitcast %162 : vector<8xf32> to vector<8xi32>
        %167 = arith.bitcast %c18 : vector<8xf32> to vector<8xi32>
        %168 = arith.subi %166, %167 : vector<8xi32>
        %169 = arith.mulf %165, %165 : vector<8xf32>
        %170 = math.fma %c22, %165, %c23 : vector<8xf32>
        %171 = math.fma %170, %165, %c24 : vector<8xf32>
        %172 = math.fma %171, %165, %c25 : vector<8xf32>
        %173 = math.fma %172, %165, %c26 : vector<8xf32>
        %174 = math.fma %173, %165, %c27 : vector<8xf32>
        %175 = arith.addf %165, %c13 : vector<8xf32>
        %176 = math.fma %169, %174, %175 : vector<8xf32>
        %177 = arith.shrsi %168, %c28 : vector<8xi32>
        %178 = arith.subi %168, %177 : vector<8xi32>
        %179 = arith.addi %177, %c29 : vector<8xi32>
        %180 = arith.shli %179, %c30 : vector<8xi32>
        %181 = arith.bitcast %180 : vector<8xi32> to vector<8xf32>
        %182 = arith.mulf %176, %181 : vector<8xf32>
        %183 = arith.addi %178, %c29 : vector<8xi32>
        %184 = arith.shli %183, %c30 : vector<8xi32>
        %185 = arith.bitcast %184 : vector<8xi32> to vector<8xf32>
        %186 = arith.mulf %182, %185 : vector<8xf32>
        %187 = llvm.getelementptr %9[%121] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        llvm.store %186, %187 {alignment = 4 : i64} : vector<8xf32>, !llvm.ptr
        %188 = arith.addf %118, %156 : vector<8xf32>
        %189 = arith.addf %119, %186 : vector<8xf32>
        scf.yield %188, %189 : vector<8xf32>, vector<8xf32>
      }
      %190 = arith.addf %120#0, %120#1 : vector<8xf32>
      %193:1 = scf.for %191 = %115 to %116 step %c9 iter_args(%192 = %190) -> (vector<8xf32>) : i64 {
        %194 = llvm.getelementptr %15[%191] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %195 = llvm.load %194 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %196 = arith.subf %195, %111 : vector<8xf32>
        %197 = arith.cmpf ogt, %196, %c16 : vector<8xf32>
        %198 = arith.select %197, %c16, %196 : vector<8xi1>, vector<8xf32>
        %199 = arith.cmpf olt, %198, %c17 : vector<8xf32>
        %200 = arith.select %199, %c17, %198 : vector<8xi1>, vector<8xf32>
        %201 = math.fma %200, %c19, %c18 : vector<8xf32>
        %202 = arith.subf %201, %c18 : vector<8xf32>
        %203 = math.fma %202, %c20, %200 : vector<8xf32>
        %204 = math.fma %202, %c21, %203 : vector<8xf32>
        %205 = arith.bitcast %201 : vector<8xf32> to vector<8xi32>
        %206 = arith.bitcast %c18 : vector<8xf32> to vector<8xi32>
        %207 = arith.subi %205, %206 : vector<8xi32>
        %208 = arith.mulf %204, %204 : vector<8xf32>
        %209 = math.fma %c22, %204, %c23 : vector<8xf32>
        %210 = math.fma %209, %204, %c24 : vector<8xf32>
        %211 = math.fma %210, %204, %c25 : vector<8xf32>
        %212 = math.fma %211, %204, %c26 : vector<8xf32>
        %213 = math.fma %212, %204, %c27 : vector<8xf32>
        %214 = arith.addf %204, %c13 : vector<8xf32>
        %215 = math.fma %208, %213, %214 : vector<8xf32>
        %216 = arith.shrsi %207, %c28 : vector<8xi32>
        %217 = arith.subi %207, %216 : vector<8xi32>
        %218 = arith.addi %216, %c29 : vector<8xi32>
        %219 = arith.shli %218, %c30 : vector<8xi32>
        %220 = arith.bitcast %219 : vector<8xi32> to vector<8xf32>
        %221 = arith.mulf %215, %220 : vector<8xf32>
        %222 = arith.addi %217, %c29 : vector<8xi32>
        %223 = arith.shli %222, %c30 : vector<8xi32>
        %224 = arith.bitcast %223 : vector<8xi32> to vector<8xf32>
        %225 = arith.mulf %221, %224 : vector<8xf32>
        %226 = llvm.getelementptr %9[%191] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        llvm.store %225, %226 {alignment = 4 : i64} : vector<8xf32>, !llvm.ptr
        %227 = arith.addf %192, %225 : vector<8xf32>
        scf.yield %227 : vector<8xf32>
      }
      %228 = arith.subi %3, %116 : i64
      %229 = arith.trunci %228 : i64 to i32
      %230 = vector.broadcast %229 : i32 to vector<8xi32>
      %231 = arith.cmpi slt, %c12, %230 : vector<8xi32>
      %232 = arith.cmpi sgt, %228, %c1 : i64
      %234:1 = scf.if %232 -> (vector<8xf32>) {
        %235 = llvm.getelementptr %15[%116] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %236 = llvm.intr.masked.load %235, %231, %c13 {alignment = 4 : i32} : (!llvm.ptr, vector<8xi1>, vector<8xf32>) -> vector<8xf32>
        %237 = arith.subf %236, %111 : vector<8xf32>
        %238 = arith.cmpf ogt, %237, %c16 : vector<8xf32>
        %239 = arith.select %238, %c16, %237 : vector<8xi1>, vector<8xf32>
        %240 = arith.cmpf olt, %239, %c17 : vector<8xf32>
        %241 = arith.select %240, %c17, %239 : vector<8xi1>, vector<8xf32>
        %242 = math.fma %241, %c19, %c18 : vector<8xf32>
        %243 = arith.subf %242, %c18 : vector<8xf32>
        %244 = math.fma %243, %c20, %241 : vector<8xf32>
        %245 = math.fma %243, %c21, %244 : vector<8xf32>
        %246 = arith.bitcast %242 : vector<8xf32> to vector<8xi32>
        %247 = arith.bitcast %c18 : vector<8xf32> to vector<8xi32>
        %248 = arith.subi %246, %247 : vector<8xi32>
        %249 = arith.mulf %245, %245 : vector<8xf32>
        %250 = math.fma %c22, %245, %c23 : vector<8xf32>
        %251 = math.fma %250, %245, %c24 : vector<8xf32>
        %252 = math.fma %251, %245, %c25 : vector<8xf32>
        %253 = math.fma %252, %245, %c26 : vector<8xf32>
        %254 = math.fma %253, %245, %c27 : vector<8xf32>
        %255 = arith.addf %245, %c13 : vector<8xf32>
        %256 = math.fma %249, %254, %255 : vector<8xf32>
        %257 = arith.shrsi %248, %c28 : vector<8xi32>
        %258 = arith.subi %248, %257 : vector<8xi32>
        %259 = arith.addi %257, %c29 : vector<8xi32>
        %260 = arith.shli %259, %c30 : vector<8xi32>
        %261 = arith.bitcast %260 : vector<8xi32> to vector<8xf32>
        %262 = arith.mulf %256, %261 : vector<8xf32>
        %263 = arith.addi %258, %c29 : vector<8xi32>
        %264 = arith.shli %263, %c30 : vector<8xi32>
        %265 = arith.bitcast %264 : vector<8xi32> to vector<8xf32>
        %266 = arith.mulf %262, %265 : vector<8xf32>
        %267 = llvm.getelementptr %9[%116] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        llvm.store %266, %267 {alignment = 4 : i64} : vector<8xf32>, !llvm.ptr
        %268 = arith.select %231, %266, %c15 : vector<8xi1>, vector<8xf32>
        %269 = arith.addf %193#0, %268 : vector<8xf32>
        scf.yield %269 : vector<8xf32>
      } else {
        scf.yield %193#0 : vector<8xf32>
      }
      %270 = vector.shuffle %234#0, %234#0 [0, 1, 2, 3] : vector<8xf32>, vector<8xf32>
      %271 = vector.shuffle %234#0, %234#0 [4, 5, 6, 7] : vector<8xf32>, vector<8xf32>
      %272 = arith.addf %270, %271 : vector<4xf32>
      %273 = vector.shuffle %272, %272 [0, 1] : vector<4xf32>, vector<4xf32>
      %274 = vector.shuffle %272, %272 [2, 3] : vector<4xf32>, vector<4xf32>
      %275 = arith.addf %273, %274 : vector<2xf32>
      %276 = vector.shuffle %275, %275 [0] : vector<2xf32>, vector<2xf32>
      %277 = vector.extract %276[0] : f32 from vector<1xf32>
      %278 = vector.shuffle %275, %275 [1] : vector<2xf32>, vector<2xf32>
      %279 = vector.extract %278[0] : f32 from vector<1xf32>
      %280 = arith.addf %277, %279 : f32
      %281 = vector.broadcast %280 : f32 to vector<8xf32>
      %282 = arith.subi %3, %c1 : i64
      %283 = arith.andi %282, %c5 : i64
      %284 = arith.andi %282, %c6 : i64
      %285 = arith.addi %c1, %283 : i64
      %286 = arith.addi %c1, %284 : i64
      scf.for %287 = %c1 to %285 step %c8 : i64 {
        %288 = arith.addi %287, %c9 : i64
        %289 = arith.addi %287, %c10 : i64
        %290 = arith.addi %287, %c11 : i64
        %291 = llvm.getelementptr %9[%287] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %292 = llvm.load %291 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %293 = llvm.getelementptr %9[%288] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %294 = llvm.load %293 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %295 = llvm.getelementptr %9[%289] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %296 = llvm.load %295 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %297 = llvm.getelementptr %9[%290] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %298 = llvm.load %297 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %299 = arith.divf %292, %281 : vector<8xf32>
        %300 = arith.divf %294, %281 : vector<8xf32>
        %301 = arith.divf %296, %281 : vector<8xf32>
        %302 = arith.divf %298, %281 : vector<8xf32>
        %303 = llvm.getelementptr %17[%287] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        llvm.store %299, %303 {alignment = 4 : i64} : vector<8xf32>, !llvm.ptr
        %304 = llvm.getelementptr %17[%288] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        llvm.store %300, %304 {alignment = 4 : i64} : vector<8xf32>, !llvm.ptr
        %305 = llvm.getelementptr %17[%289] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        llvm.store %301, %305 {alignment = 4 : i64} : vector<8xf32>, !llvm.ptr
        %306 = llvm.getelementptr %17[%290] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        llvm.store %302, %306 {alignment = 4 : i64} : vector<8xf32>, !llvm.ptr
      }
      scf.for %307 = %285 to %286 step %c9 : i64 {
        %308 = llvm.getelementptr %9[%307] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %309 = llvm.load %308 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %310 = arith.divf %309, %281 : vector<8xf32>
        %311 = llvm.getelementptr %17[%307] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        llvm.store %310, %311 {alignment = 4 : i64} : vector<8xf32>, !llvm.ptr
      }
      %312 = arith.subi %3, %286 : i64
      %313 = arith.trunci %312 : i64 to i32
      %314 = vector.broadcast %313 : i32 to vector<8xi32>
      %315 = arith.cmpi slt, %c12, %314 : vector<8xi32>
      %316 = arith.cmpi sgt, %312, %c1 : i64
      scf.if %316 {
        %317 = llvm.getelementptr %9[%286] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %318 = llvm.load %317 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %319 = arith.divf %318, %281 : vector<8xf32>
        %320 = llvm.getelementptr %17[%286] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        llvm.intr.masked.store %319, %320, %315 {alignment = 4 : i32} : vector<8xf32>, vector<8xi1> into !llvm.ptr
      }
    }
    llvm.return
}
